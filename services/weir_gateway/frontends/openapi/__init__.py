"""The HTTP surface as a document: OpenAPI for programs, and one page of it for people.

Made of the models that bodies are read with, and of the forms that answers have."""
