"""What becomes of scores in device code, for the kernels of all passes.

logits.py        softcap, biases, ALiBi and the sink, ahead of the softmax and in it
again.py         in the backward pass: P from S and its log-sum-exp, and the factor of dP - delta
derivative.py    dS = P (dP - delta), in as many ways as registers want it
"""
