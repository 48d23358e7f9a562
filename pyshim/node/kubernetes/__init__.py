"""Sizes of pods, read from manifests and RuntimeClasses and compared with the sizes of their VMs.

Start with `agreement.py`. `manifest.py` reads the files, `pod_size.py` and `quantity.py` have Kubernetes' arithmetic,
`api.py` is a client of the API server. The webhook makes the same comparison when a pod is created.
"""
