"""Everything that knows text: tokenizer, chat templates, detokenizer, stop strings, users' outputs."""
