"""What a running server does, watched from its metrics endpoint alone."""
