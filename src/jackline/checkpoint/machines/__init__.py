"""A checkpoint of a job whose machines share no folder: who has which part, and how the parts come together again."""
