"""An engine that is not needed for a while gives its memory away, and takes it back."""
