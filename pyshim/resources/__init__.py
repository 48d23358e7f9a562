"""What a pod holds, one folder per noun: network, volumes, devices, cgroups, sizing, confidential.

Each has `plan` (pure decisions), `host` (what is done on the machine) and the modules beside them (what happens while
the pod lives). `plan.py` here is the plan of a whole sandbox, `linux.py` the machine as a pod sees it.
"""
