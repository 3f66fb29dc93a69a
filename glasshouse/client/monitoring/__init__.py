"""How the client shows a running job: events, callbacks, explanations, progress bar, card.

Nothing here makes a request: the clients pass in what they have read.
"""
