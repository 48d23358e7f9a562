"""The RPCs, one class per noun. Their methods check the request, call the rooms below and build the reply."""
