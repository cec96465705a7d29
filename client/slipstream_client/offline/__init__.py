"""An offline batch: a file of requests in, a file of answers out, and nothing sent twice or lost on the way."""
