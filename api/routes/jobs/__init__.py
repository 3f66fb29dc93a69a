"""Routes of jobs: submit, list, change, control, command. What a job records is elsewhere."""
