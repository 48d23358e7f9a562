"""Sizes of pods: read from manifests and RuntimeClasses, and whether they agree with the VM.

Start with `agreement.py`; `manifest.py` reads the files, `pod_size.py` and `quantity.py` are Kubernetes' arithmetic,
`webhook` asks the same as Kubernetes creates a pod.
"""
