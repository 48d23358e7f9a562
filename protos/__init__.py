"""The wire formats pyshim speaks, as `.proto` files and the modules generated from them.

Here live only message and service definitions that two ends must share: containerd's Task and Sandbox services and
events (`containerd/`), container metrics (`cgroups/`), the guest agent (`agent/`), the remote hypervisor, the kubelet's
PodResources (`kubelet/`) and, for tests, CRI (`cri/`). No behaviour: conversion to our own types belongs to the
module `translate` of the room that speaks the protocol. Nothing here imports the rest of the project, and only
`*_pb2_grpc` modules import grpc. Never edit a generated module: change the `.proto` and run `protos/generate.py`.
Read first: `containerd/task_v2.proto`, `agent/agent.proto`, `generate.py`.
"""
