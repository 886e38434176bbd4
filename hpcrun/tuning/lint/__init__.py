"""What is wrong in the environment of a job, and where each value was set."""
