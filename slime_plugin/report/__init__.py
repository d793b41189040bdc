"""What a person looks at: drawings and summaries of records."""
