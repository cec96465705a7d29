"""The client side: command line, clients, load generator, comparison and report.

Of the server side only the model store is imported, and only by the commands that need a model.
"""
