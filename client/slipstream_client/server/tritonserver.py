"""Run a tritonserver with models of a repository: start it, wait until they are ready, end it and all it started."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream_client import control
from slipstream_client.errors import SlipstreamError
from slipstream_client.server.installation import find_tritonserver, lay_out_backends, server_environment
from slipstream_client.server.model_repository import ADMIN, find_repository, list_models, select_models
from slipstream_client.server.paths import make_server_folder, note_regions
from slipstream_client.server.ports import free_ports, require_free
from slipstream_client.server.startup_log import failure_reason
from slipstream_client.server.stubs import Stub, living_stubs
from slipstream_client.server.tethered_process import TetheredProcess
from slipstream_client.server.triton_http import TritonHttp, TritonRefused, TritonUnreachable

__all__ = ["ServerError", "TritonServer", "free_ports"]

# Unix socket paths end at 107 bytes, and the engines' sockets lie in the runtime directory.
_LONGEST_RUNTIME_DIR = 64
# Engines are drained before the server is told to end, so what it still waits for is a stub that hangs or is dead.
_EXIT_TIMEOUT_S = 8
_DRAINED_EXIT_S = 6.0
_POLL_S = 0.1


class ServerError(SlipstreamError):
    """tritonserver did not start, or ended by itself."""


class TritonServer:
    """A tritonserver of our own, bound to loopback unless told otherwise; a context manager.

    It runs in a session of its own, so that Ctrl-C in a terminal reaches only its owner, who may drain the engines
    first; and the kernel kills it when its owner dies.

    Args:
        models: names of models in the repository to load; None loads all of them.
        model: built-in name, folder or hub id of the language model; None leaves it to the models' config.pbtxt.
        device: "auto", "cpu" or "cuda"; None leaves it to the models' configurations.
        http_port, grpc_port, metrics_port: 0 picks a free one.
        log_path: the server's and the models' output is appended here; None puts it into the runtime directory.
        repository: the model repository; None finds it, see `model_repository.find_repository`.
        environment: further variables for the server and its models.
        runtime_dir: where the engines' sockets lie, private to this server; None makes one and removes it afterwards.
        start_timeout_s: seconds until all models must be ready.
        admin: load the model that tells of the engines too, where the repository has it.
    """

    def __init__(
        self,
        models: Sequence[str] | None = ("continuous",),
        model: str | None = None,
        device: str | None = None,
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        log_path: Path | None = None,
        repository: Path | None = None,
        environment: Mapping[str, str] | None = None,
        runtime_dir: Path | None = None,
        *,
        host: str = "127.0.0.1",
        start_timeout_s: float = 300.0,
        admin: bool = False,
    ) -> None:
        self.repository = find_repository(repository)
        self.models = select_models(self.repository, None if models is None else list(models))
        self.installation = find_tritonserver()
        self.host = host
        self._requested_ports = (http_port, grpc_port, metrics_port)
        self.http_port, self.grpc_port, self.metrics_port = self._requested_ports
        self._model = model
        self._device = device
        self._loaded = list(self.models)
        self._environment = dict(environment or {})
        if admin and ADMIN in list_models(self.repository):
            self._loaded.append(ADMIN)
            self._environment["SLIPSTREAM_ADMIN"] = "true"
        self._start_timeout_s = start_timeout_s
        self._given_runtime_dir = runtime_dir
        self._given_log_path = log_path
        self._scratch: Path | None = None
        self._process: TetheredProcess | None = None
        self._drained = False
        self._stubs: dict[int, Stub] = {}  # every stub that was ever seen, by pid

    @property
    def http_url(self) -> str:
        return f"{self._reachable_host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"{self._reachable_host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"{self._reachable_host}:{self.metrics_port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def process_ids(self) -> list[int]:
        """Every living process of this server: tritonserver, the models' stubs, the engines and their helpers."""
        return self._process.process_ids() if self._process else []

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(drain_seconds=20.0 if error is None else 0.0)

    def start(self) -> None:
        """Start the server and return when all models are ready.

        Raises:
            ServerError: a model did not load, the server ended, or `start_timeout_s` passed; nothing is left behind.
            SlipstreamError: a port is taken.
        """
        if self._process is not None:
            raise ServerError("the server was started before")
        self._choose_ports()
        try:
            scratch = self._make_folders()
            self._process = TetheredProcess(
                [
                    str(self.installation.binary),
                    *self._arguments(lay_out_backends(self.installation, scratch / "backends")),
                ],
                self._server_environment(),
                # Models have the working directory on sys.path: an empty one, not the caller's.
                folder=self.runtime_dir,
                output=self.log_path,
            )
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def drain(self, seconds: float = 20.0) -> dict[str, dict[str, Any]]:
        """Let every engine finish its requests, all at once, and refuse new ones: the answer of each, by its name.

        An engine that does not answer is left out.
        """
        message = {"type": "drain", "timeout_s": seconds}
        answers: dict[str, dict[str, Any]] = {}

        def ask(path: Path) -> None:
            with contextlib.suppress(control.EngineUnreachable):
                answers[path.stem] = control.request(path, message, timeout_s=seconds + 5.0)

        # Daemons, and no pool: its threads would keep a program alive that was told to end at once.
        threads = [
            threading.Thread(target=ask, args=(path,), daemon=True) for path in control.list_engines(self.runtime_dir)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._drained = len(answers) == len(threads) > 0
        return answers

    def stop(self, drain_seconds: float = 20.0) -> None:
        """Drain the engines for at most `drain_seconds`, end the server, and leave no process of it behind."""
        try:
            if self._process is not None and self._process.running:
                self._remember_stubs()
                if drain_seconds > 0:
                    self.drain(drain_seconds)
                self._process.terminate()
                # A server whose stub was killed waits for it twice. One that was drained has nothing more to do, but an
                # open stream of a client keeps it for ever.
                self._process.exited.wait(_DRAINED_EXIT_S if self._drained else 2 * _EXIT_TIMEOUT_S + 4)
        finally:
            self._end_all(grace_s=3.0)

    def kill(self) -> None:
        """End the server at once, with the requests in flight, and leave no process of it behind."""
        self._end_all(grace_s=0.0)

    def require_running(self) -> None:
        """Raise ServerError if the server has ended by itself."""
        if self._process is not None and not self._process.running:
            raise ServerError(f"tritonserver ended by itself: {self._process.ending} (log: {self._keep_log()})")

    def dead_models(self) -> list[str]:
        """Loaded models whose stub is gone: the server goes on calling them ready, and fails their requests."""
        seen = {stub.model for stub in self._stubs.values()}
        alive = {stub.model for stub in self._remember_stubs()}
        return [model for model in self._loaded if model in seen - alive]

    def reload(self, model: str) -> None:
        """Unload `model` and load it again; return when it is ready.

        Raises:
            ServerError: it did not load.
        """
        server = TritonHttp(self.http_url)
        try:
            # Loading may take as long as a start.
            server.unload(model, self._start_timeout_s)
            server.load(model, self._start_timeout_s)
        except (TritonRefused, TritonUnreachable) as error:
            raise ServerError(f"{model} could not be loaded again: {error}") from error
        self._remember_stubs()

    @property
    def _reachable_host(self) -> str:
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    def _choose_ports(self) -> None:
        flags = ("--http-port", "--grpc-port", "--metrics-port")
        for port, flag in zip(self._requested_ports, flags, strict=True):
            if port:
                require_free(port, self.host, flag)
        free = free_ports(3, self.host)
        self.http_port, self.grpc_port, self.metrics_port = (
            requested or other for requested, other in zip(self._requested_ports, free, strict=True)
        )
        if len({self.http_port, self.grpc_port, self.metrics_port}) < 3:
            raise ServerError("HTTP, gRPC and metrics need three different ports")

    def _make_folders(self) -> Path:
        """Make the runtime directory and the log; return a folder of this server's own, removed when it has ended."""
        scratch = make_server_folder(longest=_LONGEST_RUNTIME_DIR - len("/run"))
        self._scratch = scratch
        self.runtime_dir = (self._given_runtime_dir or scratch / "run").absolute()
        if len(os.fsencode(self.runtime_dir)) > _LONGEST_RUNTIME_DIR:
            raise ServerError(
                f"runtime directory {self.runtime_dir} is longer than {_LONGEST_RUNTIME_DIR} bytes, "
                "too long for the engines' sockets"
            )
        self.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log_path = (self._given_log_path or scratch / "tritonserver.log").absolute()
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self.log_path.open("ab").close()
        except OSError as error:
            raise ServerError(f"cannot write the log {self.log_path}: {error.strerror}") from error
        self._log_offset = self.log_path.stat().st_size
        return scratch

    def _arguments(self, backends: Path | None) -> list[str]:
        return [
            f"--model-repository={self.repository}",
            *([f"--backend-directory={backends}"] if backends else []),
            f"--http-address={self.host}",
            f"--grpc-address={self.host}",
            f"--metrics-address={self.host}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in self._loaded),
            "--disable-auto-complete-config",
            "--strict-readiness=true",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
        ]

    def _server_environment(self) -> dict[str, str]:
        return {
            **server_environment(self.installation),
            "SLIPSTREAM_RUNTIME_DIR": str(self.runtime_dir),
            **({"SLIPSTREAM_MODEL": _absolute_if_path(self._model)} if self._model else {}),
            **({"SLIPSTREAM_DEVICE": self._device} if self._device else {}),
            **self._environment,
        }

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        server = TritonHttp(self.http_url)
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            if self._process.exited.wait(_POLL_S):
                raise self._failure(f"tritonserver ended while starting: {self._process.ending}")
            self._remember_stubs()
            with contextlib.suppress(TritonUnreachable):
                if server.is_ready() and all(server.is_model_ready(model) for model in self._loaded):
                    return
            if time.monotonic() > deadline:
                raise self._failure(f"the models were not ready after {self._start_timeout_s:g} seconds")

    def _failure(self, what: str) -> ServerError:
        """The reason in the log, or `what` happened if there is none, and where the log is."""
        return ServerError(f"{failure_reason(self.log_path, self._log_offset) or what} (log: {self._keep_log()})")

    def _keep_log(self) -> Path:
        """Where the log stays, also when the folder of this server is removed."""
        if self._scratch is not None and self.log_path.is_relative_to(self._scratch):
            descriptor, kept = tempfile.mkstemp(prefix="tritonserver-", suffix=".log")
            os.close(descriptor)
            self.log_path = Path(shutil.copy(self.log_path, kept))
        return self.log_path

    def _remember_stubs(self) -> list[Stub]:
        living = living_stubs(self.pid)
        new = [stub for stub in living if stub.pid not in self._stubs]
        self._stubs.update((stub.pid, stub) for stub in new)
        if new and self._scratch is not None:
            note_regions(self._scratch, [stub.region for stub in new])
        return living

    def _end_all(self, grace_s: float) -> None:
        if self._process is not None:
            self._process.end_all(grace_s)
        for stub in self._stubs.values():
            stub.remove_region()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _absolute_if_path(model: str) -> str:
    """Make a folder or file absolute, since the server has another working directory; leave a name or hub id alone."""
    path = Path(model).expanduser()
    is_path = path.exists() if "/" in model or path.suffix == ".gguf" else (path / "config.json").is_file()
    return str(path.absolute()) if is_path else model
