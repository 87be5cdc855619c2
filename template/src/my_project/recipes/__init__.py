"""What is trained: one file per task. Each imports nothing of the loop."""
