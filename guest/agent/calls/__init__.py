"""The RPCs, one module per noun. Functions here check the request, call the rooms below and build the reply."""
