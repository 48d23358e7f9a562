"""The kubelet's PodResources service, over gRPC on a Unix socket.

Its `_pb2_grpc` module imports grpc, so import it only where the service is called. Read first: `podresources_v1.proto`.
"""
