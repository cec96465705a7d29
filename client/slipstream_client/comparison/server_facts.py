"""What a server says about itself and its models before anything is sent to it."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_client.tensors import ModelContract, failure_of


def read_contracts(url: str, models: Sequence[str]) -> tuple[dict[str, ModelContract], str]:
    """The contract of every model, and the server's name and version.

    Raises:
        RequestFailed: no server answers, or it does not have a model.
    """
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            server = stub.ServerMetadata(service_pb2.ServerMetadataRequest())
            configs = [stub.ModelConfig(service_pb2.ModelConfigRequest(name=model)).config for model in models]
        except grpc.RpcError as error:
            raise failure_of(error, url) from error
    return {config.name: ModelContract.of_config(config) for config in configs}, f"{server.name} {server.version}"
