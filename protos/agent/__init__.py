"""The service of the guest agent and the types it shares: what crosses from the shim into the VM, over ttrpc.

The proto packages are named `grpc` and `types` because the wire says so; none of it needs the grpc library.
Read first: `agent.proto`, then `oci.proto` for the guest spec.
"""
