"""Kernels: a folder for each part of a model, a file for each op.

A file has what the op computes (docstring), its plain-torch form (`_ref`), its kernels and their launcher (`_triton`),
and the public function, which has the shapes and picks a form. `_hopper` files have kernels in Gluon for Hopper GPUs
alone; their launchers are in the op's file, with a predicate `suits_hopper` that says when they are taken.

What the device has is asked in backend.py; overlap.py has programmatic dependent launch, gluon.py the import of Gluon.

Letters for shapes: T tokens of a step   B requests   H heads   D head dim. Each folder's docstring has its own.
Names in kernels: i_ program indices   o_ offsets   p_ pointers   b_ values in registers   m_ masks   B. block sizes
"""
