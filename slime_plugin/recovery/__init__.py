"""What an agent did to its context, recovered from its requests: turn chains, conversations, causes, the record."""
