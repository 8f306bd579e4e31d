"""What requests may ask for beside tokens: each feature is one room, which the loop does not know."""
