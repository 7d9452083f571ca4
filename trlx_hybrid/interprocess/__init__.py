"""Exchange between ranks and other processes: collective operations, waits with limits, plain data, errors."""
