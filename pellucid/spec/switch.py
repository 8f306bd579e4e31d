"""Whether drafts are made at all: an account of the time that they have saved, or cost.

A step with drafts takes so many times a plain one's seconds, and yields so many tokens a row; the difference
goes to the account, in plain steps.  A hundredth of all time comes on top: what may be spent on finding out.
So whatever drafts are like, and whatever noise is on the clock, they cost a hundredth of the time, and what
the account holds.  What a drafter takes of steps with prompts is lent until it is known whether drafts pay;
then they must have paid for that, too, and no more is lent than they may soon pay back.
Where texts have foretold what was written, what the first steps may lose is lent, too, and taken back when
drafts have gained as much, or are given up.
Drafts end when the account is empty, or before, when what is known of them says that they do not pay
(wants.py).  Then a trial is due when there is enough for one: a few steps in which some rows have drafts.
After each that finds nothing the next one is to be saved for longer, but not when most of those that run are
others than then: they may do something else.
What a plain step takes is looked at before drafts begin, and again now and then.  No torch.
"""

from __future__ import annotations

SHARE = 0.01  # of all time may be lost
LEAST_SHARE = 1 / 4  # of it, after trials that found nothing
REST = 8  # plain steps behind such a trial, and more as less is saved
FIRST, MOST = 2.0, 16.0  # plain steps: in the account at first, and at most
TRIAL = 0.5  # plain steps: to be there before drafts are made, and what a trial may lose that are not
PAYS_WITHIN = 32  # plain steps: an answer is hardly shorter
MOST_LENT = 64.0  # plain steps: lent to follow prompts, that drafts have not yet gained
MOST_AHEAD = 32.0  # plain steps: gained by drafts and not yet lent, that are remembered
LACKS = 1.0  # plain steps: of TRIAL, that the account may lack where it is all but certain that drafts pay
LOOK = 3  # plain steps, beside those under way; the first one is not counted
SOONEST, LATEST = 16, 512  # steps with drafts before another look, which costs half a hundredth between


class Switch:
    """On: drafts are wanted.  A look at plain steps lasts until enough is known."""

    def __init__(self, *, is_on: bool = False, tries: bool = True) -> None:
        """is_on: to begin with; else a look is first.  tries: else somebody knows when to `begin`."""
        self.is_on, self._tries = is_on, tries
        self.left = 0 if is_on else LOOK  # of a look, plain steps
        self.credit = FIRST
        self._most = MOST  # that is saved
        # Seconds, less what drafters have taken of prompts; and plain steps that are to be added.
        self.saved = self._uncounted = 0.0
        self.trial_steps = 0  # left of a trial, that verify drafts
        self.num_trials = 0
        self._before = FIRST  # credit, as the last one began
        self.due = TRIAL  # credit for the next one
        self._is_known, self.is_resting = is_on, False  # has there been a trial; have drafts been given up?
        self._eagerness = 1.0  # share of SHARE that is saved
        self._num_entered = 0  # since a trial found nothing
        self._rest = 0  # plain steps before the next one
        self._gained = self._owed = 0.0  # plain steps: by steps with drafts, and to steps with prompts
        self._lent = self._lent_for = 0.0  # plain steps in the account, and how many should be its own
        self._since_look = 0  # steps with drafts

    @property
    def is_looking(self) -> bool:
        """Off for a moment alone?"""
        return self.left > 0

    @property
    def is_trying(self) -> bool:
        return self.is_on and self.trial_steps > 0

    @property
    def is_due(self) -> bool:
        """Is there enough for a trial?"""
        return self.credit >= self.due and not self._rest

    def entered(self, num_rows: int) -> None:
        """One more request, beside so many rows: it may be of another kind."""
        self._num_entered += 1
        if 2 * self._num_entered >= num_rows:
            self._eagerness = 1.0

    def passed(self, took: float) -> None:
        """Time has passed without drafts, so many plain steps."""
        self.credit = max(self.credit, min(self.credit + SHARE * self._eagerness * took, self._most))

    @property
    def is_paid(self) -> bool:
        """Is nothing lent for prompts that drafts have not paid for?"""
        return self.is_resting or self._gained >= self._owed

    def may_follow(self, price: float, gain: float) -> bool:
        """Is a drafter to follow prompts, for so many plain steps?

        gain: tokens for a plain step's time, as expected.  Unless drafts have paid for all prompts before,
        they must pay for what is lent within some steps.  Where they have been given up the account must
        have enough, which is saved up to that.
        """
        if not self.is_resting:
            lent = max(0.0, self._owed - self._gained)
            return (self._is_known and not lent) or lent + price <= PAYS_WITHIN * (gain - 1)
        self._most = max(MOST, price + TRIAL)
        return self.credit >= price + TRIAL

    def may_try(self, price: float) -> bool:
        """Is it time for a trial, of so many plain steps?  One that has grown too dear is put off."""
        self.due = price
        if self.is_trying:
            self.is_on = self.is_due
            self._is_known |= self.is_on
        return self.is_trying

    def plain(self, num: int = 1) -> None:
        """So many plain steps have come home."""
        self.passed(float(num))
        self.left, self._since_look = max(0, self.left - num), 0
        self._rest = max(0, self._rest - num)
        if self.is_on or self.is_looking:
            return
        if self._is_known and not self.is_resting:
            self.is_on = self.credit > 0
        elif self.is_due and self._tries:
            self.is_on = True
            self.trial_steps, self._before = 1, self.credit
            self.num_trials += 1

    def drafted(
        self, tokens: float, took: float, plain_seconds: float, *, has_drafts: bool, lost: float = 0.0
    ) -> None:
        """A step with drafts, or with their proposer alone, has come home.

        tokens: a row.  took: plain steps.  lost: of what that saves, because some rows have got less.
        """
        gained = tokens - took - lost
        self.credit = min(self.credit + SHARE + gained, max(MOST, self.credit))
        if self.credit >= min(self._lent + self._lent_for, MOST):
            self._pay_back()
        self._save(tokens - took, plain_seconds)
        self.gained(gained)
        self._since_look += 1
        self.trial_steps = max(0, self.trial_steps - has_drafts)
        if (self.is_on or not self.is_resting) and self.credit < -TRIAL * self.is_trying:
            self.give_up()

    def followed(self, took: float, gained: float = 0.0, plain_seconds: float | None = None) -> None:
        """A drafter has taken so many plain steps of a step with prompts, whose drafts have saved so many."""
        self._save(gained - took, plain_seconds)
        self.gained(gained)
        self._owed += took
        if self.is_resting:
            self.credit -= took - min(0.0, gained)
        is_empty = self.is_on and self.is_resting and self.credit < -TRIAL
        if is_empty or (not self.is_resting and self._owed - self._gained > MOST_LENT):
            self.give_up()

    def _save(self, steps: float, plain_seconds: float | None) -> None:
        """None: it is not known yet, and counted as soon as it is."""
        self._uncounted += steps
        if plain_seconds is not None:
            self.saved += self._uncounted * plain_seconds
            self._uncounted = 0.0

    def gained(self, steps: float) -> None:
        """Drafts have saved so many plain steps."""
        self._gained = min(self._gained + steps, self._owed + MOST_AHEAD)

    def look(self) -> None:
        """Go without for a moment."""
        self._since_look = 0
        self.is_on, self.left = False, LOOK

    def is_stale(self, gain: float) -> bool:
        """Is it time for a look?  gain: tokens for a plain step's; the nearer to 1, the less a look costs."""
        return self._since_look >= min(max(SOONEST, LOOK * (gain - 1) / (SHARE / 2)), LATEST)

    @property
    def may_begin(self) -> bool:
        """Is it off, with something in the account to lose?"""
        return self.may_borrow and self.credit >= TRIAL

    @property
    def may_borrow(self) -> bool:
        """Is it off, and may it begin with what is lent if it is all but certain that drafts pay?"""
        return not self.is_on and not self.is_looking and self.credit >= TRIAL - LACKS

    def begin(self, least: float = TRIAL) -> None:
        """It is known that they pay.  least: is to be in the account; what lacks is lent until they have."""
        self._pay_back()
        self._lent, self._lent_for = max(0.0, least - self.credit), least
        self.credit += self._lent
        self.is_on = self._is_known = True
        self.is_resting, self.trial_steps = False, 0

    def _pay_back(self) -> None:
        self.credit, self._lent = self.credit - self._lent, 0.0

    def give_up(self) -> None:
        """They do not pay."""
        self._pay_back()
        if self.is_resting:  # a trial has found nothing
            self._eagerness = max(self._eagerness / 2, LEAST_SHARE)
            self.credit = min(self.credit, self._before - TRIAL)
            self._rest = round(REST / self._eagerness)
        else:  # what was lent for prompts is paid back, some of it
            debt = max(0.0, self._owed - max(0.0, self._gained))
            least = -MOST if self._is_known and debt > MOST_LENT else -FIRST
            self.credit = max(self.credit - debt, min(self.credit, least))
        self._gained = self._owed = 0.0
        self.is_on, self.is_resting = False, True
        self.trial_steps = self._num_entered = 0

    def keep(self) -> None:
        """They pay."""
        self.trial_steps, self.is_resting, self._eagerness = 0, False, 1.0
