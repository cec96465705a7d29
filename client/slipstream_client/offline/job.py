"""One batch: which of its requests are left, and where their answers go."""

from __future__ import annotations

from slipstream_client.errors import SlipstreamError
from slipstream_client.offline.answers import answer_line
from slipstream_client.offline.input_file import InputFile
from slipstream_client.offline.lines import BatchRequest
from slipstream_client.offline.output_file import Answered, OutputFile, RequestLog
from slipstream_client.offline.runner import RETRIED_CODES, Attempt, Outcome
from slipstream_client.tensors import ModelContract, RequestFailed


class BatchJob:
    """The input, and what the output says of it.

    Attributes:
        kept: requests that have ended and stay so: answered, or failed for good.
        left: how many there are to send, those among them that failed with what another attempt may mend.
        failures: codes of all failures that the output holds, by request.
        texts: of the failures of this run.

    Raises:
        SlipstreamError: the output does not belong to the input.
    """

    def __init__(self, source: InputFile, output: OutputFile, attempts: RequestLog, retry_failed: bool) -> None:
        self.source = source
        self._output = output
        self._attempts = attempts
        answered = output.read()
        self._again = {id_ for id_, answer in answered.items() if _is_sent_again(answer, retry_failed)}
        self.kept = {id_: answer for id_, answer in answered.items() if id_ not in self._again}
        self.left = len(source.digests) - len(self.kept)
        self.failures: dict[str, str] = {
            id_: answer.error_code for id_, answer in self.kept.items() if answer.error_code is not None
        }
        self.texts: list[str] = []
        self._require_same_requests(answered)

    def begin(self, contract: ModelContract) -> None:
        """Make sure that the model takes the requests, and make room for those that are sent again."""
        self.source.check_for(contract)
        if self._again:
            self._output.drop(self._again)

    def note_attempt(self, attempt: Attempt) -> None:
        self._attempts.append(attempt.as_log_line())

    def keep(self, request: BatchRequest, outcome: Outcome) -> None:
        self._output.append(answer_line(request, outcome))
        if isinstance(outcome, RequestFailed):
            self.failures[request.id] = outcome.code
            self.texts.append(f"{request.id}: {outcome}")

    def _require_same_requests(self, answered: dict[str, Answered]) -> None:
        path, digests = self._output.path, self.source.digests
        strange = [id_ for id_ in answered if id_ not in digests]
        if strange:
            raise SlipstreamError(f"{path} answers {strange[0]!r}, which {self.source.path} does not ask: name another")
        for id_, answer in self.kept.items():
            if answer.digest != digests[id_]:
                what = "answered" if answer.error_code is None else "refused (--retry-failed sends it again)"
                raise SlipstreamError(
                    f"{id_!r} was {what} in {path}, and its request has changed since then: its line in "
                    f"{self.source.path} or --max-tokens; give it another id, or name another output"
                )


def _is_sent_again(answer: Answered, retry_failed: bool) -> bool:
    return answer.error_code is not None and (retry_failed or answer.error_code in RETRIED_CODES)
