"""The ledger: which prompt of which epoch is where, with its samples, so that each is trained exactly once.

A prompt goes this way, each arrow one transaction:

    (cursor) -> open -> finished -> leased -> trained
                  \\-> dropped      (to a trainer's step; trained when the step is in a checkpoint)

The data cursor, the samples and the hand-over lie in one database, so no crash parts them (docs/adr/0018).
"""
