"""Requests as users send them: what is offered, when, to which server, and what came of each."""
