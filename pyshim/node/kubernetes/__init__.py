"""Sizes of pods, read from manifests and RuntimeClasses and compared with the sizes of their VMs.

Start with `agreement.py`, the comparison, which the webhook makes when a pod is created. `manifest.py` reads the files,
`pod_size.py` has Kubernetes' arithmetic, `pod_vm.py` the VM's, `overhead.py` that of a RuntimeClass.
`api.py` is a client of the API server.
"""
