"""The command `etc-dist serve`: serves a model by OpenAI's HTTP interface.

serve_command.py   the command: its options, and what each rank does
jobs.py            messages between threads, and between ranks
engine.py          the main thread of rank 0: which texts join and leave each step
stepper.py         the owner of the batch, on every rank
logprobs.py        the probabilities of tokens, from the logits of all ranks
front.py           the thread of the event loop, which has the HTTP server
app.py             the routes, and their limits
clients.py         the jobs of the clients that are connected
request_fields.py  the fields of a request: honoured, neutral, or refused by name
answers.py         the JSON of answers
writer.py          the text of a job's ids, up to a stop string
metrics.py         counters for Prometheus

On rank 0, the main thread steps the model and another thread runs the event loop. A job
goes from the loop to the engine through one queue, and its ids come back as calls in
the loop, once a step. Other ranks make the same calls of the batch."""
