"""Measurements of parts of Slipstream, each stated as a ratio taken in one run."""
