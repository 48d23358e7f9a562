"""The installation on a node of a cluster: the pod of a DaemonSet installs, labels and cleans it (`pyshim node-agent`).

Read `agent.py` first: it has the order of the steps. `plan.py` has the Node object's labels and annotations (pure),
`payload.py` runs `pyshim install` in the host's mount namespace.
"""
