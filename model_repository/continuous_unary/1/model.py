"""The continuous engine's door; see slipstream.doors.continuous."""

from slipstream.doors.continuous import ContinuousDoor as TritonPythonModel  # noqa: F401
