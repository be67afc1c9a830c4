"""Synthetic models: random weights in the shapes of real models, for measuring speed and for tests.

`shapes` knows the models' sizes and tensors, `blocks` draws packed weights, `vocabulary` makes up a tokenizer, `writer`
puts them into a file. What such a model writes makes no sense, but its work is that of the real one.
"""
