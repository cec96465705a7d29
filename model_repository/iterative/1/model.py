"""The door of Triton's iterative sequences; see slipstream.doors.iterative."""

from slipstream.doors.iterative import IterativeDoor as TritonPythonModel  # noqa: F401
