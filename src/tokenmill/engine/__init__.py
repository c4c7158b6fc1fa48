"""The engine: plan a step, execute it on the tape, commit what came out."""
