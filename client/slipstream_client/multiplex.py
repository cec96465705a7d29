"""Many requests on one gRPC stream, told apart by request id; the responses of each wait in its own inbox.

Triton puts the request's id on every response, errors included, which is what makes sharing a stream safe. (The stream
class of tritonclient drops the id of an error, so this uses the generated stub underneath it.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from slipstream_client.tensors import RequestFailed, failure_of, is_final

# For a server to end a stream on which nothing runs any more.
_END_TIMEOUT_S = 2.0

Inbox = SimpleQueue[Any]  # of ModelInferResponse, ended by a final one or by a RequestFailed


class SharedStream:
    """Opens a stream when the first request comes, and a new one after the server broke it. Thread safe."""

    def __init__(self, stub: Any, url: str) -> None:
        self._stub = stub
        self._url = url
        self._lock = threading.Lock()
        self._connection: Stream | None = None

    def send(self, request: service_pb2.ModelInferRequest) -> Inbox:
        """Send a request; its responses come to the inbox that is returned.

        Raises:
            RequestFailed: a request with this id is still running.
        """
        with self._lock:
            inbox = self._connection.add(request) if self._connection else None
            if inbox is None:
                self._connection = Stream(self._stub, self._url)
                inbox = self._connection.open(request)
            return inbox

    def forget(self, request_id: str) -> None:
        """Drop whatever still comes for this id."""
        with self._lock:
            if self._connection:
                self._connection.forget(request_id)

    def close(self) -> None:
        """End the stream; the server cancels what still runs on it."""
        with self._lock:
            if self._connection:
                self._connection.close()
            self._connection = None


class Stream:
    """One gRPC stream, its reader thread, and the inboxes of the requests that run on it.

    Who waits for a response waits at an inbox, not inside gRPC: there Ctrl-C can leave a lock behind that nothing opens
    again.
    """

    def __init__(self, stub: Any, url: str) -> None:
        self._stub = stub
        self._url = url
        self._lock = threading.Lock()
        self._broken = False
        self._inboxes: dict[str, Inbox] = {}
        self._outgoing: SimpleQueue[service_pb2.ModelInferRequest | None] = SimpleQueue()
        self._call: Any = None
        self._reader = threading.Thread(target=self._read, name="slipstream-responses", daemon=True)

    def open(self, request: service_pb2.ModelInferRequest) -> Inbox:
        """Open the stream with its first request, whose inbox hears of it if that fails."""
        inbox: Inbox = SimpleQueue()
        self._inboxes[request.id] = inbox
        self._outgoing.put(request)
        self._call = self._stub.ModelStreamInfer(self._requests())
        self._reader.start()
        return inbox

    def add(self, request: service_pb2.ModelInferRequest) -> Inbox | None:
        """Send a request, or return None where the stream is broken."""
        with self._lock:
            if self._broken:
                return None
            if request.id in self._inboxes:
                raise RequestFailed(f"a request with id {request.id} is still running", "ALREADY_EXISTS")
            inbox: Inbox = SimpleQueue()
            self._inboxes[request.id] = inbox
            self._outgoing.put(request)
            return inbox

    def forget(self, request_id: str) -> None:
        with self._lock:
            self._inboxes.pop(request_id, None)

    def close(self) -> None:
        """End the stream; the server cancels what still runs on it."""
        self._outgoing.put(None)
        if self._call is None:  # Ctrl-C came while it was opened
            return
        with self._lock:
            idle = not self._inboxes
        if idle and self._reader.is_alive():
            self._reader.join(_END_TIMEOUT_S)  # to the end of the stream: see `is_final`
        self._call.cancel()

    def _requests(self) -> Iterator[service_pb2.ModelInferRequest]:
        while (request := self._outgoing.get()) is not None:
            yield request

    def _read(self) -> None:
        try:
            for message in self._call:
                self._deliver(message)
            reason = RequestFailed("the server closed the stream", "UNAVAILABLE")
        except grpc.RpcError as error:
            reason = failure_of(error, self._url)
        with self._lock:
            self._broken = True
            pending, self._inboxes = self._inboxes, {}
        self._outgoing.put(None)
        for inbox in pending.values():
            inbox.put(reason)

    def _deliver(self, message: service_pb2.ModelStreamInferResponse) -> None:
        response = message.infer_response
        ended = bool(message.error_message) or is_final(response)
        with self._lock:
            inbox = self._inboxes.pop(response.id, None) if ended else self._inboxes.get(response.id)
        if inbox:
            inbox.put(RequestFailed(message.error_message) if message.error_message else response)
