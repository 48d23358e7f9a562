"""The node of a cluster, which the pod of a DaemonSet installs, labels and cleans (`pyshim node-agent`).

`agent.py` is the order of things, `plan.py` what the Node object then says (pure), `host.py` runs commands in the
host's mount namespace, `payload.py` takes `pyshim install` there, `api.py` asks the API server. Read `agent.py` first.
"""
