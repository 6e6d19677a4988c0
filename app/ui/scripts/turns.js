// Runs when the page is open: from then on the events that change what the chat shows run one after the other.
const PATIENCE_MS = 10000; // with a reply that does not come
let last = Promise.resolve();
globalThis.chatEvents = {
  async enter() {
    const before = last;
    let leave;
    last = new Promise((resolve) => { leave = resolve; });
    await before;
    this.leave = leave;
    setTimeout(leave, PATIENCE_MS);
  },
};
