"""The application: the command line, runs of tasks, their reports, and launching several processes."""
