"""The parts of `train_language_model.py`, one file for each thing there is to learn.

`parallel.py` is the heart: a data-parallel train step whose gradients `jax_ring` averages. Around
it: `config.py` (options and their checks), `data.py` (text to batches), `model.py` (the
transformer), `checkpoint.py` (save and resume), `processes.py` (how several meet), `hlo.py` (what
the compiler made of the collective), `report.py` (plot and tables) and `training.py` (the loop that
ties them together).
"""
