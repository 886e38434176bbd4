"""From a job file to a job in the queue, and Python functions as jobs."""
