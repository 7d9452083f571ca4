"""Where tools run: threads, processes, the event loop, the trainer's thread."""
