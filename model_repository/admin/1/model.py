"""A window into the engines; see slipstream.doors.admin."""

from slipstream.doors.admin import AdminDoor as TritonPythonModel  # noqa: F401
