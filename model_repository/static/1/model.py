"""The lock-step engine's door; see slipstream.doors.lockstep."""

from slipstream.doors.lockstep import LockstepDoor as TritonPythonModel  # noqa: F401
