"""
How fast etlstage is, side by side with what it is compared to.

``python -m benchmarks`` runs all questions, ``python -m benchmarks lockstep`` one.
"""
