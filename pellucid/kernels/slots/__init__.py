"""What a recorded step does with its slots: inputs gathered, advanced, and drafts found in texts."""
