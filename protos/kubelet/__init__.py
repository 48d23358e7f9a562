"""The kubelet's services and those it calls, over gRPC on Unix sockets: PodResources, plugin registration, DRA.

The `_pb2_grpc` modules import grpc, so import them only where a service is called or served.
"""
