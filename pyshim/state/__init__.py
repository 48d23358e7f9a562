"""The persisted state of a sandbox: schema (Kata's key names), atomic store, ledger."""
