"""The operator process: watches feed a store, a queue runs `reconcile`, an executor performs one action at a time."""
