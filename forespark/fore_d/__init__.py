"""Draft-verify joint scheduling: survival, scores, prices, plan and split.

Symbols used in this package: R = requests, K = largest draft length, d = draft length
of a request, j = position in a draft (1..K), N = non-speculative tokens of the
verification pass, n = requests that sample, B = draft tokens verified, M = sum of d.
Every stage has a plain reference and a fast twin that tests hold equal.
"""
