"""Measurements of parts of Slipstream, each stated as a ratio taken in one run."""

import os

# As in an engine process (slipstream.engine.link.engine_environment); read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
