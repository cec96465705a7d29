"""The client side: command line, clients, load generator, comparison and report. Imports nothing of the server side."""
