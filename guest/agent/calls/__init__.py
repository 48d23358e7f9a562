"""The RPCs, one class per noun. A method checks the request, calls the rooms below and builds the reply."""
